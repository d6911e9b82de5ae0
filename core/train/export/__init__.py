"""What a job hands back."""
