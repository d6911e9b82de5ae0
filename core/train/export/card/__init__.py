"""The model card of what a job hands back."""
