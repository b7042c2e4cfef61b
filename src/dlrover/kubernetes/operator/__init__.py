"""The operator's shell: watches, carries out decisions, elects a leader, reports its health."""
