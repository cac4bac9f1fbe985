"""What the server measures: requests as they end, the engine when it is asked, under names of Prometheus."""
