"""Forms of requests around any word, beside the lists of `prompts`: what a list holds is soon known
by heart, and drafts are then worse of everything else.

{word} and {word2} are words of the target's vocabulary, of any kind: a request may make no
sense, its answer is the target's all the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

ADJECTIVES = """old|new|small|large|quiet|noisy|cheap|expensive|broken|beautiful|strange|simple|
famous|forgotten|local|modern|green|red|blue|golden|wooden|cold|warm|dark|bright|heavy|light|young|
brave|clever|lazy|honest|nervous|cheerful|rich|poor|tired|hungry|friendly|proud"""

NAMES = """Alice|Hassan|Emma|Lucas|Priya|Chen|Olga|Diego|Fatima|Noah|Ingrid|Kofi|Laura|Victor|Mei|
Samuel|Nina|Pablo|Ruth|Yusuf|Clara|George|Hana|Ivan"""

# Each takes the place of a template's word of that name.
FORMS = {
    "task": """counts the {word} in a list|sorts a list of {word} by size|reads {word} from a
file|stores {word} in a dictionary|removes every {adjective} {word} from a list|groups {word}
by length|prints a table of {word} and {word2}|checks if a {word} is valid|converts {word}
into {word2}|searches a {word} by name|computes the total price of {word}|returns the {n} most
common {word}|compares two {word} objects|defines a class for a {word} with a {word2}|writes
{word} to a CSV file|filters {word} by a minimum of {a}|merges {word} with {word2}|draws a
chart of {word}|asks the user for a {word}|updates the {word} of a {word2}|splits a {word}
into parts of {b}|finds the first {word} without a {word2}|simulates a {adjective} {word}|
caches a {word}|schedules a {word} every {b} minutes|tests whether a {word} contains a {word2}""",
    "character": """a {adjective} {word}|{person}, a {adjective} {word}|a {word} called
{person}|a {adjective} {word} and a {adjective2} {word2}|{person} and the {word}|a girl who
loves {word}|a {word} who wants to be a {word2}|the last {word}|an artist named {person}|a
{adjective} teacher of {word}|a family with a {adjective} {word}""",
    "place": """near the {word}|in a {adjective} {word}|at the {word} market|behind a
{adjective} {word}|on the way to the {word}|in a town called {word}|in the year of the {word}|
before the {word}|in a world without {word}|under a {adjective} {word}|at {person}'s house|in
a {adjective} garden""",
    "recipient": """the {word} department|the {word} committee|{person}|{person} from the
{word} team|the owner of the {word}|a {adjective} colleague|our {word} supplier|the editor of
{word}|the {word} club|my cousin {person}""",
    "matter": """about the {word}|asking about the {adjective} {word}|reporting a broken
{word}|recommending {word}|complaining about the {word}|inviting them to the {word}|thanking
them for the {word}|asking them to bring the {word}|offering a {adjective} {word}|explaining
why the {word} is late|proposing a meeting on {word}|asking for help with {word}|ordering {a}
{word}|selling a {adjective} {word}|announcing a change of the {word}|confirming the {word}
for next {word2}""",
    "sentence": """the {word} was {adjective} but the {word2} are not|i dont like {word} because
its {adjective}|he have a {adjective} {word} since two year|we was at the {word} when {person}
call|can you send me the {word} asap|yesterday she buy {word} and a {adjective} {word2}|this
{word} is more {adjective} than the {word2}|{person} say that the {word} dont work|i want to
know where can i find the {word}|our {word} is the most {adjective} in the town|they has forgot
to bring the {word}|the {word} cost too much and nobody need it""",
    "statement": """The {adjective} {word} was sold to {person} for {c} dollars|{person} wrote a
long letter about the {word}|There are {a} {word} in the {adjective} house|Every spring the
{word} returns to the {word2}|The {word} is closed until {person} comes back|Nobody in the
village had ever seen a {adjective} {word}|The {word} costs less than the {word2}|{person} lost
the {word} on the way to the station|A {adjective} {word} stood beside the door|The price of
{word} rose by {b} percent last year|{person} and {person2} share a {adjective} {word}|The
meeting on {word} begins at {b} o'clock|It took {a} days to repair the {word}|The {word}
belongs to the oldest {word2} of the country|Only {b} of the {a} {word} were {adjective}|
{person} teaches {word} at a {adjective} school""",
    "thing": """{word}|{adjective} {word}|boxes of {word}|bags of {word}""",
}

# Each stands beside the templates of its domain.
TEMPLATES = {
    "explain": """How does {topic} work?|What does {topic} mean?|Why do people need {topic}?|
What happens when {topic} meets {topic2}?|Describe a {adjective} {word} to someone who never saw
one.|How is {topic} made?|Where does the word {word} come from?|What makes {topic}
{adjective}?|Explain the role of {topic} in {topic2}.|How do I get started with {topic}?|
Explain step by step how to use {topic}.|Why is {topic} so {adjective}?""",
    "qa": """What is {topic}?|Who was {person} {Word}?|How much does {topic} cost?|When was
{topic} invented?|Can I use {topic} for {topic2}?|Is {topic} {adjective}?|How many {word} are
there?|How long does {topic} last?|What do you think about {topic}?|Do {word} need {word2}?|
How can I choose a {adjective} {word}?|What should I do if my {word} is {adjective}?|What is
the opposite of {word}?|What is a {adjective} {word} used for?|Why did {person} leave the
{word}?""",
    "lists": """Name {n} kinds of {topic}.|Give me {n} words that describe {topic}.|Plan a day
around {topic}.|List {n} reasons to like {topic}.|Give me {n} names for a {adjective} {word}.|
Suggest {n} gifts for someone who likes {topic}.|What do I need to pack for {topic}?|Make a
plan for a week of {topic}.|List the advantages of {topic} over {topic2}.|Write a recipe with
{word} and {word2}.|Give me {n} synonyms of {word}.|Write {n} slogans for a {adjective} {word}.""",
    "story": """Write a short story with the words {word}, {word2} and {adjective}.|Continue
this story: {statement0}.|Write a fairy tale about {character}.|Write a {adjective} poem about
{topic} and {topic2}.|Write a diary entry of {character}.|Tell me a joke about {topic}.|Write
a letter from {character} to {person}.|Write a scene in which {character} meets {person}
{place}.|Write a song about {topic}.""",
    "code": """Write a {language} class that {task}.|How can I fix a {language} program that
{task} too slowly?|Explain what this does: {word}.{word2}({a}).|What does the error "{word} is
not defined" mean in {language}?|Write an SQL query that finds the {adjective} {word} of each
{word2}.|Write a regular expression that matches {word} followed by {a}.|Write a shell command
that {task}.|Write an HTML page about {topic}.""",
    "maths": """{person} has {a} {thing} and {person2} has {b} times as many. How many do they
have together?|Divide {c} {thing} among {b} friends. How many are left?|What is {c} minus {a}
times {b}?|A {word} weighs {a} kilograms. What do {b} of them weigh?|What is {c} divided by
{b}?|If {b} {thing} cost ${a}, what do {c} cost?|Is {c} a prime number?|{person} walks {b}
kilometres a day. How far is that in {a} days?|What is the square of {a}?|Convert {c} minutes
into hours.|A {word} costs ${c} and is reduced by {a} percent. What is the new price?""",
    "rewrite": """Translate into simple English: {statement0}. {statement1}.|Make this sound
more {adjective}: {statement0}.|Turn this into a question: {statement0}.|Write this in the past
tense: {sentence}.|Make one sentence of these: {statement0}. {statement1}.|Add more detail:
{statement0}.|Write this as a headline: {statement0}.""",
    "email": """Write a reply to this message: {statement0}. {sentence}.|Write an invitation to
a {adjective} {word} for {recipient}.|Write a text message to {person} {matter}.|Write a
complaint to {recipient} {matter}.|Write an announcement about the {word} for {recipient}.""",
    "summary": """Summarise in three words: {text}|Write a title for this text: {text}|Who and
what is this text about? {text}""",
    "copy": """Repeat after me: {statement0}.|Write this {b} times: {word} {word2}|Copy this
sentence: {statement0}.""",
}


def items(text: str) -> list[str]:
    """Of a list that "|" divides; lines may be broken anywhere."""
    return [" ".join(item.split()) for item in text.split("|")]


_ADJECTIVES, _NAMES = items(ADJECTIVES), items(NAMES)
_FORMS = {key: items(text) for key, text in FORMS.items()}
_TEMPLATES = {domain: items(text) for domain, text in TEMPLATES.items()}


def any_words(rng: random.Random, topics: Sequence[str], numbers: dict[str, str]) -> dict[str, str]:
    """What the forms' own places are filled with."""
    word, word2 = rng.choice(topics), rng.choice(topics)
    adjectives, names = rng.sample(_ADJECTIVES, 2), rng.sample(_NAMES, 2)
    return {
        **numbers,
        **{"word": word, "Word": word.capitalize(), "word2": word2},
        **dict(zip(("adjective", "adjective2"), adjectives, strict=True)),
        **dict(zip(("person", "person2"), names, strict=True)),
    }


def mixed_in(
    rng: random.Random, domain: str, template: str, words: dict[str, str], topics: Sequence[str]
) -> tuple[str, dict[str, str]]:
    """Template and words with half of the words, and the template in half of the cases, of here.

    Args:
        words: of each place of a template, the numbers n, a, b and c among them; "topic2" is a
            place for what "topic" is.
        topics: words of the target's vocabulary.

    Returns:
        the template, and the words of its places.
    """
    numbers = {key: words[key] for key in "nabc"}
    mixed = any_words(rng, topics, numbers)
    for place, word in words.items():
        forms = topics if place.startswith("topic") else _FORMS.get(place.rstrip("0123456789"))
        if forms and rng.random() < 0.5:
            word = rng.choice(forms).format(**any_words(rng, topics, numbers))
        mixed[place] = word
    if domain in _TEMPLATES and rng.random() < 0.5:
        template = rng.choice(_TEMPLATES[domain])
    return template, mixed
