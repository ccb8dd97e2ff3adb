"""What decides a token once the logits are there: options, processors, filters, noise, grammars. All of it pure."""
