"""What the user gives, checked before anything starts."""
