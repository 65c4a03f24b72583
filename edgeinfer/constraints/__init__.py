"""What may follow: JSON schemas, regular expressions and grammars as masks over the tokens, by llguidance."""
