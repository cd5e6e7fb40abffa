"""The tests mirror the packages; a package here, so that helpers are imported by full name."""
