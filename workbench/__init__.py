"""The workbench around the engine: traces, the command line, benchmarks, and later views."""
