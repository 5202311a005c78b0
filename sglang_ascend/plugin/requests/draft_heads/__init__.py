"""Draft heads of the tokens that each request's drafts can be."""
