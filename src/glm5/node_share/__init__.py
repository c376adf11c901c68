"""One rank's share of a layout, trained on one device: its memory, its time, what it would send."""
