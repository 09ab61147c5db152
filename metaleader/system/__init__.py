"""Files, downloads and facts about the machine."""
