"""``dlrover-run``: its command line, its foreground and its last screen."""
