"""Changes of the database's tables from version to version, as alembic keeps them."""
