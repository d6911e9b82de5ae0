"""Which job runs next, and where: order, gangs, preemption, shares."""
