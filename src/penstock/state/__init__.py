"""What a pipeline remembers: phases, positions, schemas, progress, the lease and commands; three stores for it."""
