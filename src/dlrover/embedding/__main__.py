"""``python -m dlrover.embedding``: an embedding server of a job; ``dlrover-run --embedding-servers`` starts it."""

from dlrover.embedding.remote.app import main

if __name__ == "__main__":
    raise SystemExit(main())
