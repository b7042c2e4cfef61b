"""The page of DLRover: jobs, their time, nodes, faults, plans and logs, live in a browser or frozen in a file."""
