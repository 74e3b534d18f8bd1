"""Prompts for the tests that serve a real model: short ones, some with a prefix in common, and long ones."""

SHORT = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "How many days has a week?",
    "Translate 'good morning' into Spanish.",
    "What do bees make?",
    "Say hello.",
]
PASSAGE = (
    "The lighthouse stood on a rock two miles from the village. Every evening the keeper climbed ninety-one steps, "
    "trimmed the lamp and wrote the weather into a book. In the winter of the great storm the boat could not cross for "
    "eleven days, and he shared his last bread with a seal that had come in through the broken door. "
)
SHARED_PREFIX = [
    PASSAGE * 2 + question
    for question in (
        "How many steps did the keeper climb?",
        "Where did the lighthouse stand?",
        "What did the keeper write into his book?",
        "For how long could the boat not cross?",
        "With whom did he share his bread?",
        "Give this text a title.",
        "Was the door broken or whole?",
        "What season was it?",
    )
]
# Lengths on both sides of multiples of pages and of chunks
LONG = [
    f"Continue this list of numbers: {' '.join(str(n) for n in range(start, start + 17 * start))}"
    for start in range(3, 11)
]
PROMPTS = SHORT + SHARED_PREFIX + LONG
