"""The formats that a job hands back beside what it trained, one file each."""
