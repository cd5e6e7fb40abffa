"""The running engine: sequences, scheduling, the step loop, and the one door for operators."""
