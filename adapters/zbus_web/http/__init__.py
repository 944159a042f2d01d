"""HTTP basics: settings, connection limits, errors, event JSON, assets and open streams."""
