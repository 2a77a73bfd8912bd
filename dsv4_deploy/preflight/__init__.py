"""Checks of the real host before a byte of weights is read: facts and plan to findings with cause and fix."""
