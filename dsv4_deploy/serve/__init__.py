"""Runs what the plan says: starts vLLM as a supervised child, follows it, remembers it, stops it."""
