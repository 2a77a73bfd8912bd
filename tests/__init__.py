"""The tests mirror the tree. They are packages, so that two of them may hold a file of the same name."""
