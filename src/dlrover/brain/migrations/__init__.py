"""Migrations of the database's tables from version to version, in alembic's form."""
