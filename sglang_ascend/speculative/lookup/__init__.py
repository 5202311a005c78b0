"""Drafts by prompt lookup, and when they are worth more than the MTP layer's."""
