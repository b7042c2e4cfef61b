"""Where nodes come from: "make me this node, tell me what became of it"."""
