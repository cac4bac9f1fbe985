"""Several replicas of a server's engine on Ray Serve, behind one HTTP address."""
