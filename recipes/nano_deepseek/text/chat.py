"""Owns the short chat tasks (English and Chinese) that nano-deepseek learns from.

Each template draws its words from the given generator; facts are tables, so they can be checked.
"""

import json
from random import Random

from recipes.nano_deepseek.text.maths import ITEMS, NAMES, QuestionAnswer

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Russia": "Moscow",
    "Egypt": "Cairo",
    "India": "New Delhi",
    "Canada": "Ottawa",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
    "Poland": "Warsaw",
}
CAPITALS_ZH = {"中国": "北京", "日本": "东京", "法国": "巴黎", "德国": "柏林", "英国": "伦敦"}
FUNCTIONS = (
    ("adds two numbers", "add", "a, b", "return a + b"),
    ("multiplies two numbers", "multiply", "a, b", "return a * b"),
    ("returns the square of a number", "square", "x", "return x * x"),
    ("checks if a number is even", "is_even", "n", "return n % 2 == 0"),
    ("reverses a string", "reverse", "s", "return s[::-1]"),
    ("returns the largest item of a list", "largest", "items", "return max(items)"),
    ("counts the vowels in a string", "count_vowels", "s", "return sum(c in 'aeiou' for c in s)"),
    (
        "computes the factorial of n",
        "factorial",
        "n",
        "return 1 if n < 2 else n * factorial(n - 1)",
    ),
    ("returns the sum of a list", "total", "items", "return sum(items)"),
    ("returns the last item of a list", "last", "items", "return items[-1]"),
)
GROUPS = {
    "fruits": "apples pears plums grapes cherries lemons".split(),
    "animals": "dogs cats horses foxes bears sheep".split(),
    "colours": "red blue green yellow white black".split(),
    "tools": "hammer saw drill knife axe spade".split(),
    "trees": "oak pine birch maple willow beech".split(),
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "old": "new",
    "long": "short",
    "light": "dark",
    "hard": "soft",
    "early": "late",
    "rich": "poor",
    "full": "empty",
}
TOPICS = {
    "rain": "Water rises from the sea as vapour, cools in the clouds, and falls back as drops.",
    "the sun": "The sun is a star. Its centre is so hot that hydrogen turns into helium, "
    "which gives light and heat.",
    "a river": "A river carries water from the hills to the sea, and shapes the land on its way.",
    "a computer": "A computer follows a list of simple instructions very quickly, "
    "one after another.",
    "bread": "Bread is made of flour, water, salt and yeast. The yeast makes the dough rise.",
    "a bridge": "A bridge lets people cross a river or a road. "
    "Its weight rests on strong supports.",
    "the moon": "The moon goes round the earth in about a month and reflects the light of the sun.",
    "a library": "A library keeps many books and lends them, so that everyone can read for free.",
}
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
PLACES = "forest,village,harbour,valley,garden,market,castle,desert".split(",")
ANIMALS = "fox,bear,owl,horse,goat,cat,dog,crow".split(",")


def capital(rng: Random) -> QuestionAnswer:
    country, city = rng.choice(list(CAPITALS.items()))
    question = rng.choice(
        (
            f"What is the capital of {country}?",
            f"Which city is the capital of {country}?",
            f"Tell me the capital of {country}.",
            f"Please name the capital of {country}.",
            f"Do you know the capital of {country}?",
        )
    )
    return question, f"The capital of {country} is {city}."


def capital_zh(rng: Random) -> QuestionAnswer:
    country, city = rng.choice(list(CAPITALS_ZH.items()))
    question = rng.choice((f"{country}的首都是哪里？", f"请问{country}的首都是什么？"))
    return question, f"{country}的首都是{city}。"


def function(rng: Random) -> QuestionAnswer:
    purpose, name, arguments, body = rng.choice(FUNCTIONS)
    question = rng.choice(
        (
            f"Write a Python function that {purpose}.",
            f"Please write a function in Python which {purpose}.",
            f"I need Python code that {purpose}.",
            f"Show me a Python function named {name} that {purpose}.",
        )
    )
    return question, (
        f"Here is a Python function that {purpose}:\n"
        f"```python\ndef {name}({arguments}):\n    {body}\n```"
    )


def greeting(rng: Random) -> QuestionAnswer:
    name = rng.choice(NAMES)
    question = rng.choice((f"Hello, my name is {name}.", f"Hi! I am {name}.", f"{name} here, hi!"))
    return question, f"Hello {name}! Nice to meet you. How can I help you today?"


def greeting_zh(rng: Random) -> QuestionAnswer:
    name = rng.choice(NAMES)
    question = rng.choice((f"你好，我叫{name}。", f"您好！我是{name}，你是谁？"))
    return question, f"你好，{name}！我是一个很小的语言模型，很高兴认识你。有什么可以帮你的吗？"


def count(rng: Random) -> QuestionAnswer:
    start = rng.randint(1, 40)
    end = start + rng.randint(4, 15)
    question = rng.choice((f"Count from {start} to {end}.", f"Please count {start} to {end}."))
    return question, ", ".join(map(str, range(start, end + 1))) + "."


def repeat(rng: Random) -> QuestionAnswer:
    words = rng.sample(list(ITEMS) + NAMES, rng.randint(3, 6))
    return f"Repeat these words: {' '.join(words)}", " ".join(words)


def sort(rng: Random) -> QuestionAnswer:
    words = rng.sample(list(ITEMS), rng.randint(3, 5))
    return f"Sort these words: {' '.join(words)}", "Sorted: " + " ".join(sorted(words))


def first_word(rng: Random) -> QuestionAnswer:
    words = rng.sample(list(ITEMS), rng.randint(3, 6))
    which = rng.choice(("first", "last"))
    word = words[0] if which == "first" else words[-1]
    return f"What is the {which} word: {' '.join(words)}?", f"The {which} word is {word}."


def translate(rng: Random) -> QuestionAnswer:
    english, chinese = rng.choice(list(ITEMS.items()))
    question, answer = rng.choice(
        (
            (f"How do you say {english} in Chinese?", f"In Chinese, {english} is {chinese}."),
            (f"Translate {english} into Chinese.", f"In Chinese, {english} is {chinese}."),
            (f"What does {chinese} mean?", f"{chinese} means {english}."),
            (f"{chinese}用英语怎么说？", f"{chinese}的英语是 {english}。"),
        )
    )
    return question, answer


def as_json(rng: Random) -> QuestionAnswer:
    values: dict[str, str | int] = {
        "name": rng.choice(NAMES),
        "age": rng.randint(5, 80),
        "city": rng.choice(list(CAPITALS.values())),
        "item": rng.choice(list(ITEMS)),
        "count": rng.randint(1, 99),
    }
    keys = rng.sample(list(values), rng.randint(2, 4))
    wanted = ", ".join(f"{key} {values[key]}" for key in keys)
    return (
        f"Write a JSON object with {wanted}.",
        json.dumps({key: values[key] for key in keys}),
    )


def list_group(rng: Random) -> QuestionAnswer:
    group, members = rng.choice(list(GROUPS.items()))
    number = rng.randint(3, 6)
    question = rng.choice((f"List {number} {group}.", f"Can you name {number} {group}, please?"))
    lines = [f"{i + 1}. {member}" for i, member in enumerate(members[:number])]
    return question, f"Here are {number} {group}:\n" + "\n".join(lines)


def opposite(rng: Random) -> QuestionAnswer:
    word, other = rng.choice(list(OPPOSITES.items()))
    if rng.random() < 0.5:
        word, other = other, word
    question = rng.choice((f"What is the opposite of {word}?", f"Give me the opposite of {word}."))
    return question, f"The opposite of {word} is {other}."


def next_day(rng: Random) -> QuestionAnswer:
    index = rng.randrange(7)
    step, word = rng.choice(((1, "after"), (-1, "before")))
    day = DAYS[index]
    question = rng.choice((f"Which day comes {word} {day}?", f"What day is {word} {day}?"))
    return question, f"The day {word} {day} is {DAYS[(index + step) % 7]}."


def explain(rng: Random) -> QuestionAnswer:
    topic, text = rng.choice(list(TOPICS.items()))
    question = rng.choice(
        (
            f"Explain {topic} to a child.",
            f"What can you tell me about {topic}?",
            f"Describe {topic} in simple words.",
            f"Please explain {topic}.",
        )
    )
    return question, text


def story(rng: Random) -> QuestionAnswer:
    name, animal, place = rng.choice(NAMES), rng.choice(ANIMALS), rng.choice(PLACES)
    item = rng.choice(list(ITEMS))
    question = rng.choice(
        (
            f"Tell me a short story about {name} and a {animal} in a {place}, with {item}.",
            f"Write a story: {name}, a {animal}, a {place}, {item}.",
        )
    )
    return question, (
        f"Once there was a child called {name} who lived near a {place}. One morning {name} met "
        f"a {animal} that was looking for {item}. They searched all day, and in the evening they "
        f"found the {item} under an old tree. From then on {name} and the {animal} were friends."
    )


def email(rng: Random) -> QuestionAnswer:
    sender, receiver = rng.sample(NAMES, 2)
    day, place = rng.choice(DAYS), rng.choice(PLACES)
    return (
        f"Write an email from {sender} to {receiver} about meeting at the {place} on {day}.",
        f"Subject: Meeting on {day}\n\nDear {receiver},\n\nI would like to meet you at the {place} "
        f"on {day}. Please let me know if that suits you.\n\nBest wishes,\n{sender}",
    )


def larger(rng: Random) -> QuestionAnswer:
    a, b = rng.sample(range(1, 200), 2)
    if rng.random() < 0.5:
        return f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}."
    return f"{a}和{b}哪个大？", f"{max(a, b)}比{min(a, b)}大。"


def spell(rng: Random) -> QuestionAnswer:
    word = rng.choice(list(ITEMS) + PLACES + ANIMALS + NAMES)
    question = rng.choice((f"Spell the word {word}.", f"How do you spell {word}?"))
    return question, "-".join(word.upper())


TEMPLATES = (
    capital,
    capital_zh,
    function,
    greeting,
    greeting_zh,
    count,
    repeat,
    sort,
    first_word,
    translate,
    as_json,
    list_group,
    opposite,
    next_day,
    explain,
    story,
    email,
    larger,
    spell,
)


def sample(rng: Random) -> QuestionAnswer:
    """Draw one (question, answer)."""
    return rng.choice(TEMPLATES)(rng)
