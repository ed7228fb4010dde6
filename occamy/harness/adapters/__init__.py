"""Black-box adapters: agent programs as they are, each a declaration (YAML) with a thin launcher."""
