"""From accepted drafts and rates of rounds to a report and its plot."""
