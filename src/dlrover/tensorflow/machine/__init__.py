"""Pure decisions about a TensorFlow cluster."""
