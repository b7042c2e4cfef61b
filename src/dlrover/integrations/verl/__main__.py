"""``python -m dlrover.integrations.verl [-m MODULE | SCRIPT] ARGS...``."""

from dlrover.integrations.verl.launch import main

raise SystemExit(main())
