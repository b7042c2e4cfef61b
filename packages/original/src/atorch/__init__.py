"""The names of ATorch that scripts import, on DLRover; see docs/from-dlrover.md there."""
