"""The cold tier: offloaded segments in Parquet files."""
