"""One module a claim: its parameters, arms, checks and figure. The notebooks tell the story around them."""
