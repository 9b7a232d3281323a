"""Compares source and destination at one position while both are in use."""
