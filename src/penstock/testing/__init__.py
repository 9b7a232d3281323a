"""What tests of Penstock, and of what is built on it, need: a Postgres server of their own."""
