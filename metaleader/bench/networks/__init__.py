"""Networks of many kinds: an update by every mode of the engine and by other libraries, each in its own process."""
