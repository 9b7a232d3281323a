"""Source against destination: equal at one position, while both live."""
