"""The commands. Each module has one; `main` puts them together."""
