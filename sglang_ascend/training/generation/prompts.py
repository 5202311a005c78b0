"""Training prompts: templated chat requests over eleven domains, in a seeded order.

The model's own sampled user turns are the other half of the prompts; `generate` makes those.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_ascend.training.generation import word_forms
from sglang_ascend.training.generation.word_forms import items

DOMAINS = (
    *("code", "maths", "email", "explain", "story", "qa", "lists", "rewrite"),
    *("copy", "summary", "chinese"),
)

TOPICS = """photosynthesis|volcanoes|the water cycle|black holes|gravity|inflation|
compound interest|supply and demand|the French Revolution|the Roman Empire|the Silk Road|
the printing press|vaccines|antibiotics|sleep|memory|the human heart|the immune system|protein|
vitamins|solar panels|wind power|batteries|electric cars|recycling|plastic waste|climate change|
coral reefs|whales|honey bees|octopuses|migration of birds|wolves|mushrooms|rainforests|deserts|
glaciers|earthquakes|tides|the moon|Mars|comets|telescopes|satellites|radio waves|lasers|magnets|
atoms|chemical bonds|acids and bases|DNA|evolution|cells|enzymes|neurons|fever|headaches|yoga|
running|swimming|chess|football|cycling|hiking|camping|gardening|cooking pasta|baking bread|coffee|
tea|chocolate|cheese|spices|sushi|healthy breakfasts|meal planning|budgeting|saving money|
credit cards|mortgages|the stock market|taxes|starting a business|marketing|job interviews|teamwork|
leadership|time management|public speaking|negotiation|remote work|stress|meditation|friendship|
parenting|homework|learning languages|reading habits|poetry|jazz|the piano|painting|photography|
theatre|film editing|architecture|bridges|trains|airplanes|ships|maps|calendars|clocks|money|
democracy|elections|courts|human rights|privacy|passwords|encryption|spam|databases|the internet|
web browsers|cloud computing|neural networks|sorting algorithms|operating systems|version control|
software testing|binary numbers|probability|prime numbers|fractions|percentages|geometry|statistics|
calculus|logic puzzles|Japan|Brazil|Egypt|Canada|India|Kenya|Iceland|Australia|Mexico|Norway|
the Great Wall of China|the pyramids|the Olympic Games|Shakespeare|Leonardo da Vinci|Marie Curie|
Isaac Newton|dinosaurs|penguins|spiders|trees|roses|rivers|clouds|thunderstorms|snow"""

CHARACTERS = """a shy dragon|a young baker|an old sailor|a lost robot|a curious cat|two sisters|
a retired detective|a village doctor|a talking tree|an astronaut|a clever fox|a lonely king|
a music teacher|a painter|a farmer's son|a night guard|a librarian|a tiny mouse|a ghost|
a mountain guide|an inventor|a street musician|a lighthouse keeper|a brave knight"""

PLACES = """in a quiet village|on a distant planet|by the sea|in a snowy forest|in a big city|
on a train|in an old castle|in the desert|in a small shop|under the ocean|at a school|
on a stormy night|in the future|at a summer fair|on a farm|in a library"""

RECIPIENTS = """my manager|a customer|my teacher|a new colleague|the hotel|my landlord|the team|
a supplier|my professor|a job applicant|the bank|a friend|my neighbour|the school|a client|
the HR department|a conference organiser|an airline|my doctor's office|a journalist"""

MATTERS = """asking for a day off|apologising for a late reply|confirming a meeting on Friday|
requesting a refund|inviting them to a dinner|thanking them for their help|reporting a problem|
asking for a deadline extension|declining an offer politely|introducing myself|
asking about the price|complaining about noise|recommending a book|announcing a new product|
asking for feedback|cancelling a booking|following up on an interview|explaining a delay|
congratulating them on a promotion|sharing the minutes of a meeting"""

TASKS = """reverses a string|computes the factorial of a number|checks if a number is prime|
finds the largest element of a list|counts the vowels in a text|removes duplicates from a list|
merges two sorted lists|converts Celsius to Fahrenheit|computes Fibonacci numbers|
checks whether a word is a palindrome|sorts a list of dictionaries by a key|reads a CSV file|
counts the words in a file|computes the average of a list|generates a random password|
finds the second largest number|flattens a nested list|validates an email address|
computes the greatest common divisor|prints a multiplication table|implements a stack|
implements binary search|rotates a list|finds the common elements of two lists|
capitalises every word|computes the area of a circle|simulates rolling two dice|
converts a number to binary|finds the longest word in a sentence|implements a queue|
implements a simple calculator|downloads a web page|parses JSON|computes the median|
transposes a matrix|counts how often each character occurs|checks for balanced brackets|
sums the digits of a number|implements bubble sort|implements a linked list"""

SENTENCES = """the meeting was moved to monday because nobody had time|
i cant come to work today im sick|we are very sorry that your order did arrive late|
he don't know where is the station|the film was good but it was too long and i was bored|
please send me the report as soon as you can|our product is cheap and it works good|
she go to school every day by the bus|the weather was bad so the game was stopped|
i think that your idea is not very good|thanks for the help you gave me last week with the project|
there is many reasons for this problem|me and him was at the party until late|
the results of the test was not what we hoped|
you must fix this bug right now or we lose the customer|the food was cold and the waiter was rude|
it is important that all people drinks enough water|the company want to hire more people next year|
i am writing because i have a question about the invoice|
the new phone is fast but battery is weak"""

STATEMENTS = """The old mill by the river was turned into a small museum last spring|
Most visitors come on Sundays, when the entrance is free|The bus to the airport leaves every
twenty minutes from the main square|Our office will be closed on the first of May|The new teacher
speaks four languages and plays the violin|Water boils at a lower temperature on high mountains|
The recipe needs two eggs, a cup of sugar and a little butter|He found the keys under the seat of
the car|The company sold twice as many bicycles as in the year before|A storm destroyed the roof of
the school in November|The children planted forty trees along the road|Please send the signed form
back by Wednesday|The museum shop sells postcards, maps and small toys|Her train was two hours late
because of snow on the tracks|The committee will choose one of the three designs in June|Wool keeps
you warm even when it is wet|The first version of the program was slow and hard to use|Nobody
answered the phone, so she left a message|The village has one baker, one doctor and no bank|In
winter the sun sets before four in the afternoon|The experiment was repeated five times with the
same result|Fresh bread is delivered to the hotel at six every morning|The lake is deep, cold and
full of fish|Both teams agreed to meet again next week"""

CHINESE_TOPICS = """太阳|月亮|冬天|夏天|大海|长城|北京|上海|茶|米饭|面条|苹果|狗|马|熊猫|
鸟|火车|飞机|手机|电脑|互联网|音乐|电影|足球|书|学校|老师|医生|朋友|家庭|睡眠|运动|健康的饮食|数学|
历史|环境保护|春节|中秋节"""

CHINESE_SENTENCES = """他每天早上六点起床|我想买一本新书|昨天晚上下了大雨|她是我最好的朋友|
我们明天坐火车去北京|这家饭馆的菜很好吃|请把窗户打开|孩子们在花园里玩|我不知道他住在哪里|
图书馆星期一不开门|这件衣服太贵了|他的哥哥是医生"""

TEMPLATES: dict[str, tuple[str, ...]] = {
    "code": (
        "Write a Python function that {task}.",
        "Write a {language} program that {task}.",
        "How do I write code that {task} in {language}?",
        "Give me a short {language} function that {task} and explain how it works.",
        "Write a {language} function that {task}. Add comments.",
        "Write a unit test for a Python function that {task}.",
    ),
    "maths": (
        "What is {a} times {b}?",
        "Solve for x: {b}x + {a} = {c}.",
        "A shop sells {thing} for ${b} each. How much do {a} of them cost?",
        "{name} has {c} {thing} and gives away {b}. How many are left? Show your steps.",
        "What is {b} percent of {c}? Explain step by step.",
        "A train travels {c} kilometres in {b} hours. What is its average speed?",
        "Find the area of a rectangle with length {a} and width {b}.",
        "{name} buys {b} {thing} at ${a} each and pays with ${c}. How much change is there?",
        "What is the sum of the first {a} positive integers?",
        "Find the derivative of f(x) = {b}x^3 + {a}x.",
    ),
    "email": (
        "Write an email to {recipient} {matter}.",
        "Write a short, polite email to {recipient} {matter}.",
        "Help me write a formal letter to {recipient} {matter}.",
        "Draft a friendly message to {recipient} {matter}.",
    ),
    "explain": (
        "Explain {topic} in simple terms.",
        "Explain {topic} to a ten-year-old.",
        "What should I know about {topic}?",
        "Can you describe how {topic} changed over time?",
        "Why does {topic} matter? Explain with an example.",
        "Give me a short introduction to {topic}.",
        "What are common misunderstandings about {topic}?",
        "Write a paragraph about {topic}.",
    ),
    "story": (
        "Write a short story about {character} {place}.",
        "Tell me a bedtime story about {character} and {character2}.",
        "Write a story in which {character} learns something about {topic}.",
        "Write the opening of a novel about {character} {place}.",
        "Write a poem about {topic}.",
        "Write a dialogue between {character} and {character2} {place}.",
    ),
    "qa": (
        "What is the main idea behind {topic}?",
        "Who first studied {topic}?",
        "Is {topic} useful in everyday life?",
        "What is the difference between {topic} and {topic2}?",
        "Where can I learn more about {topic}?",
        "What are the advantages and disadvantages of {topic}?",
        "How are {topic} and {topic2} related?",
        "I am curious about {topic}. What is the most surprising fact?",
    ),
    "lists": (
        "List {n} facts about {topic}.",
        "Give me {n} tips about {topic}.",
        "Suggest {n} titles for an article about {topic}.",
        "Make a checklist for someone interested in {topic}.",
        "Name {n} questions that I could ask an expert on {topic}.",
        "Give me {n} ideas for a class project on {topic}.",
        "Make a numbered list of the steps to learn about {topic}.",
    ),
    "rewrite": (
        "Rewrite this sentence in a formal tone: {sentence}.",
        "Correct the grammar of this sentence: {sentence}.",
        'Make this shorter and clearer: "{sentence}, {sentence2}."',
        "Improve the style of the following text: {sentence}. {sentence2}.",
        'Rewrite as a friendly message: "{sentence}."',
        "Summarise in one sentence: {sentence}. {sentence2}. {sentence3}.",
        'Paraphrase: "{sentence}."',
    ),
    "copy": (
        "Repeat exactly: {text}",
        "Repeat the following text without changing anything.\n{text}",
        "Write this text again, word for word:\n\n{text}",
        'Copy the text between the quotes: "{text}"',
        "Copy this list exactly:\n1. {topic}\n2. {thing}\n3. {topic2}\n4. {character}",
        "Print these lines again:\n{topic}: {a} {thing}\n{topic2}: {b} {thing}",
    ),
    "summary": (
        "Summarise: {text}",
        "Summarise the following text in one sentence.\n{text}",
        "Give me a short summary of this:\n\n{text}",
        "What is the main point of this text?\n{text}",
        "List the key points of the following message:\n{text}",
        'Shorten this text: "{text}"',
    ),
    "chinese": (
        "请介绍一下{chinese_topic}。",
        "什么是{chinese_topic}?",
        "为什么{chinese_topic}很重要?",
        "请用中文写一段关于{chinese_topic}的话。",
        "请写一个关于{chinese_topic}的小故事。",
        "关于{chinese_topic},请给我三个建议。",
        "{chinese_topic}和{chinese_topic2}有什么不同?",
        "请把这句话翻译成英文:{chinese_sentence}。",
        "请重复这句话:{chinese_sentence}。",
        "请用简单的话解释{chinese_topic}。",
    ),
}


_STATEMENTS = items(STATEMENTS)
_WORDS = {
    "topic": items(TOPICS),
    "character": items(CHARACTERS),
    "place": items(PLACES),
    "recipient": items(RECIPIENTS),
    "matter": items(MATTERS),
    "task": items(TASKS),
    "sentence": items(SENTENCES),
    "chinese_topic": items(CHINESE_TOPICS),
    "chinese_sentence": items(CHINESE_SENTENCES),
    "language": ["Python", "JavaScript", "Java", "C", "Go", "C++", "Bash", "SQL"],
    "thing": ["apples", "books", "pens", "tickets", "cakes", "stamps", "bottles", "shirts"],
    "name": ["Anna", "Ben", "Maria", "Tom", "Li", "Omar", "Sara", "David"],
}


def vocabulary_words(tokenizer: Any) -> list[str]:
    """Tokens of a tokenizer that are a word of five Latin letters or more: topics by the thousand.

    A few lists of topics would be known by heart before a layer drafts well of anything else.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    # A space is written so by byte-level tokenizers, and by SentencePiece's.
    found = (re.fullmatch(r"[Ġ▁]([A-Za-z][a-z]{4,})", token or "") for token in tokens)
    return [match[1] for match in found if match]


def templated_prompt(
    rng: random.Random, domain: str | None = None, topics: Sequence[str] = ()
) -> str:
    """One request: a domain if none is given, one of its templates and its words, each drawn
    uniformly; with words of a vocabulary as ``topics`` half of them are made of those."""
    domain = domain or rng.choice(DOMAINS)
    template = rng.choice(TEMPLATES[domain])
    words = {key: rng.choice(values) for key, values in _WORDS.items()}
    for key in ("topic2", "character2", "sentence2", "sentence3", "chinese_topic2"):
        words[key] = rng.choice(_WORDS[key[:-1]])
    statements = rng.sample(_STATEMENTS, rng.randint(2, 5))
    words |= {"n": rng.choice(("three", "five", "5", "ten", "7")), "a": str(rng.randint(3, 40))}
    words |= {"b": str(rng.randint(2, 12)), "c": str(rng.randint(50, 480))}
    words |= {f"statement{i}": one for i, one in enumerate(statements)}
    if topics:
        template, words = word_forms.mixed_in(rng, domain, template, words, topics)
    text = ". ".join(words[f"statement{i}"] for i in range(len(statements))) + "."
    return template.format(**words, text=text)


def prompt_key(prompt: str) -> str:
    """The form under which two prompts count as the same: letters and digits, lower case."""
    return "".join(letter for letter in prompt.lower() if letter.isalnum())


def templated_prompts(seed: int, excluded: set[str], topics: Sequence[str] = ()) -> Iterator[str]:
    """Endless distinct templated prompts, none whose key is in `excluded` (which grows)."""
    rng = random.Random(seed)
    while True:
        prompt = templated_prompt(rng, topics=topics)
        if prompt_key(prompt) not in excluded:
            excluded.add(prompt_key(prompt))
            yield prompt
