"""What a node measures when it is checked. Nothing here is needed for it: without PyTorch less is checked."""
