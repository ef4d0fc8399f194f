"""What runs on CPUs."""
