"""What a step is: its tokens, its state on the device, and how its tokens are drawn."""
