"""Asks a running server real questions and checks the answers."""
