"""Search documents: rows of several tables joined into one JSON document per root row, kept while they change."""
