"""The text of compiled programs (HLO): instructions, executions, collectives, and the arrays alive at the peak."""
