"""What is computed in the job's sandbox: rewards by programs, and the problems and verifiers of tasks."""
