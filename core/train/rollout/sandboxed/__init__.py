"""What is computed in the job's sandbox: rewards by programs, and problems and verifiers of tasks, and games."""
