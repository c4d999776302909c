OTHER_TESTS: dict[str, str] = {}
