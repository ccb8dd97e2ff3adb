"""Writes prompts.jsonl: what users of a small chat model ask, put together from tasks and subjects.

None of them is one of the benchmark's (scripts/prompts.jsonl), nor asks for the same with other words.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

SUBJECTS = """gravity; the water cycle; volcanoes; inflation; vaccines; black holes; the internet; electricity; magnets; democracy;
earthquakes; DNA; the Roman Empire; the French Revolution; climate change; solar panels; batteries; recycling; the moon; tides;
rainbows; evolution; dinosaurs; fossils; machine learning; a computer; a search engine; encryption; a database; an algorithm;
the stock market; interest rates; taxes; supply and demand; the heart; the brain; digestion; the immune system; muscles; bones;
the ocean; coral reefs; deserts; rainforests; bees; butterflies; whales; elephants; penguins; owls; chess; football; jazz;
the piano; painting; poetry; architecture; bridges; trains; aeroplanes; rockets; satellites; telescopes; microscopes; atoms;
acids; metals; glass; paper; bread; cheese; chocolate; coffee; tea; wine; rice; yeast; sound; light; heat; friction""".replace(
    "\n", " "
).split("; ")
ABOUT = [
    "Explain how {} works in simple terms.", "What is {}?", "Explain {} to a child.", "Why is {} important?",
    "Tell me three interesting facts about {}.", "Write a short paragraph about {}.", "Give a short history of {}.",
    "What are the most common misconceptions about {}?", "Write a poem about {}.", "How did people first learn about {}?",
    "What are the main parts of {}?", "List five questions that a student might ask about {}.",
]  # fmt: skip
HOW = """cook rice; learn a new language; save money; plan a garden; train a puppy; write a resume; prepare for an interview;
clean a kitchen; fix a flat bicycle tyre; start running; make friends in a new city; stay focused at work; study for an exam;
organise a small office; plan a birthday party; reduce food waste; bake bread; make coffee; choose a laptop; protect a password;
speak in public; read more books; learn to swim; pack a suitcase; grow tomatoes; keep a diary; manage stress; build a website;
take better photos; paint a wall; move house; choose a bicycle; cut down on sugar; use less water; run a meeting; give feedback;
write a speech; teach a class; care for a cat; lower an electricity bill""".replace("\n", " ").split("; ")
TO = [
    "How do I {}?", "Give me five tips on how to {}.", "What should I know before I {}?", "Make a checklist to {}.",
    "What mistakes do people make when they {}?", "Write a step-by-step guide: {}.", "I want to {}. Where do I begin?",
    "Explain to a beginner how to {}.",
]  # fmt: skip
PAIRS = """a lake and a river; weather and climate; a comet and an asteroid; a simile and a metaphor; a frog and a toad; mass and weight;
speed and velocity; a fruit and a vegetable; a republic and a monarchy; a loan and a grant; RAM and storage; HTTP and HTTPS;
a list and a tuple; a compiler and an interpreter; a process and a thread; jam and jelly; an alligator and a crocodile; a novel
and a novella; baking soda and baking powder; empathy and sympathy; a crow and a raven; a union and a join; bonds and shares;
a cold and the flu; a butterfly and a moth; renting and buying a house""".replace("\n", " ").split("; ")
BETWEEN = ["What is the difference between {}?", "Compare {}.", "How do I tell {} apart?", "Explain {} with examples."]
HEROES = """a lost dog; a clockmaker; a young dragon; a shy robot; two sisters; an old fisherman; a night baker; a curious fox; a violin;
a train driver; a gardener; a small town in winter; a detective; a pilot; a librarian; a magic pencil; a beekeeper; a child who
finds a map; a retired teacher; a ghost who is afraid of people""".replace("\n", " ").split("; ")
STORIES = [
    "Tell me a story about {}.", "Write a fairy tale about {}.", "Write the beginning of a novel about {}.", "Write a short poem about {}.",
    "Write a dialogue with {}.", "Write a bedtime story about {}.",
]  # fmt: skip
MAILS = """asking for a day off; inviting a colleague to lunch; declining an invitation; thanking a teacher; asking for a refund; announcing a
meeting; applying for an internship; apologising for a late delivery; asking a neighbour to be quieter; congratulating a friend;
reporting a broken laptop; cancelling a subscription; asking for a letter of recommendation; welcoming a new team member; asking
about the price of a room; moving an appointment; thanking a host; complaining about a noisy hotel; asking a shop about an order;
proposing a project""".replace("\n", " ").split("; ")
LETTERS = [
    "Write a polite email {}.",
    "Write a short message {}.",
    "Write a formal letter {}.",
    "Draft a friendly email {}.",
]
TASKS = """computes the factorial of a number; checks whether a number is prime; finds the largest number in a list; removes duplicates from
a list; checks whether a string is a palindrome; computes the Fibonacci numbers; sorts a list with bubble sort; sorts a list with
quicksort; does a binary search; counts the vowels in a string; finds the second largest number in a list; flattens a nested list;
transposes a matrix; multiplies two matrices; converts Celsius to Fahrenheit; computes the greatest common divisor; sums the digits
of a number; checks whether two strings are anagrams; finds the longest word in a sentence; capitalises each word; computes the
average of a list; rotates a list by k places; finds the missing number from 1 to n; reads a CSV file and prints its rows; writes a
dictionary to a JSON file; downloads a web page; finds all even numbers; groups words by their first letter; validates an email
address; generates a random password; computes compound interest; converts a number to binary; counts how often each character
occurs; finds the intersection of two lists; checks for balanced parentheses; computes the power of a number; prints a
multiplication table; finds the common prefix of a list of strings; shuffles a list; computes the distance between two points;
converts seconds to hours and minutes; renames all files in a folder; retries a call three times; measures how long a function
takes; reads numbers from the user and prints their sum; finds the median of a list; chunks a list into parts of size n; turns a list
of pairs into a dictionary; checks whether a year is a leap year; guesses a number""".replace("\n", " ").split("; ")
PROGRAMS = [
    "Write a Python function that {}.", "Write a JavaScript function that {}.", "Write a Java method that {}.", "Write a C function that {}.",
    "Write a Python function that {}, with type hints and a docstring.", "Write a Go function that {}.", "Write a C++ function that {}.",
    "Write a Python program that {}, and explain each step.", "Show me two ways to write a Python function that {}.",
    "Write a Rust function that {}.", "Write a unit test in Python for a function that {}.", "Write a Ruby method that {}.",
]  # fmt: skip
THINGS = """a queue; a linked list; a bank account; a rectangle; a circle; a student; a library of books; a shopping cart; a playing card;
a deck of cards; a timer; a binary tree; a priority queue; a matrix; a fraction; a point in the plane; a car; a todo list; a cache;
a logger; an inventory; a chess board; a hotel room; an employee; a graph""".replace("\n", " ").split("; ")
CLASSES = [
    "Write a Python class for {}.", "Write a Java class for {}.", "Write a JavaScript class for {}, with an example of its use.",
    "Write a Python dataclass for {}.", "Write a C++ class for {}.", "Design a database table for {} and write the SQL that creates it.",
]  # fmt: skip
QUERIES = """lists all employees with a salary above 50000; counts the orders of each month; returns the average price by category; finds
products that were never ordered; joins students with their courses; deletes rows older than a year; updates the price of all books
by ten percent; returns the newest ten posts; finds duplicate email addresses; lists departments with more than five employees;
returns the total sales of each region; finds the oldest user; lists the names of all cities in alphabetical order""".replace(
    "\n", " "
).split("; ")
PAGES = """a login form; a navigation bar; a table with three columns; a photo gallery; a contact form; a centred card; a button that changes
colour; a list that can be sorted; a progress bar; a dark mode switch; a footer; a clock""".replace("\n", " ").split(
    "; "
)
MARKUP = ["Write HTML and CSS for {}.", "Write a React component for {}.", "Write JavaScript for {}, step by step."]
NAMES = ["Tom", "Lena", "Omar", "Priya", "Jack", "Mei", "Carlos", "Nina"]
SUMS = [
    "{n} has {a} apples and gives away {b}. How many are left?", "{n} buys {b} books at {c} dollars each. How much does {n} pay?",
    "A car drives at {a} kilometres per hour for {c} hours. How far does it go?", "What is {a} percent of {b}00?",
    "{n} is {b} years old, and a brother is {c} years younger. How old will the brother be in {b} years?",
    "A rectangle is {a} metres long and {b} metres wide. What are its area and perimeter?", "Solve for x: {c}x + {b} = {a}.",
    "{n} reads {b} pages a day. How many days does a book of {a}0 pages take?", "A recipe for {c} people needs {b} eggs. How many for {a} people?",
    "If a shirt costs {a} dollars and is reduced by {b} percent, what is the new price? Show the steps.",
    "A tank holds {a}0 litres and loses {c} litres an hour. When is it empty?", "What is the average of {a}, {b} and {c}?",
]  # fmt: skip
PLACES = [
    "the market",
    "the station",
    "the school",
    "the beach",
    "the museum",
    "the old bridge",
    "the park",
    "the office",
]
FACTS = [
    "opened in {y} and closes at {h} o'clock", "is ten minutes from the hotel", "was painted {c} last spring", "is loud in the morning",
    "had {n} visitors in May", "sells bread and flowers", "is older than the town hall", "needs a new roof",
    "is where {p} met an old friend", "belongs to the city since {y}",
]  # fmt: skip
COLOURS = ["red", "white", "green", "yellow", "blue"]
ON_TEXT = [
    "Summarise this text in one sentence: {}", "What are the main points of this text? {}", "Rewrite this text in simpler words: {}",
    "Translate to German: {}", "Translate to French: {}", "Translate to Spanish: {}", "Make this text more formal: {}",
    "Write a title for this text: {}", "List the places in this text: {}", "Continue this text: {}", "Turn this text into bullet points: {}",
    "Correct any mistakes in this text: {}", "List all numbers in this text: {}", "Put this text into the past tense: {}",
]  # fmt: skip


def text(random_: random.Random) -> str:
    sentences = []
    for place in random_.sample(PLACES, random_.randint(1, 4)):
        facts = random_.sample(FACTS, random_.randint(1, 2))
        filled = " and ".join(facts).format(
            y=random_.randint(1850, 2020), h=random_.randint(4, 10), c=random_.choice(COLOURS),
            n=random_.randint(20, 900), p=random_.choice(NAMES),
        )  # fmt: skip
        sentences.append(f"{place[0].upper()}{place[1:]} {filled}.")
    return " ".join(sentences)


def prompts(seed: int) -> list[dict[str, str]]:
    random_ = random.Random(seed)
    chat = [pattern.format(subject) for pattern, subject in product(ABOUT, SUBJECTS)]
    chat += [pattern.format(task) for pattern, task in product(TO, HOW)]
    chat += [pattern.format(pair) for pattern, pair in product(BETWEEN, PAIRS)]
    chat += [pattern.format(hero) for pattern, hero in product(STORIES, HEROES)]
    chat += [pattern.format(mail) for pattern, mail in product(LETTERS, MAILS)]
    code = [pattern.format(task) for pattern, task in product(PROGRAMS, TASKS)]
    code += [pattern.format(thing) for pattern, thing in product(CLASSES, THINGS)]
    code += [f"Write a SQL query that {query}." for query in QUERIES]
    code += [pattern.format(page) for pattern, page in product(MARKUP, PAGES)]
    numbers = [(random_.randint(20, 90), random_.randint(5, 19), random_.randint(2, 4)) for _ in range(60)]
    reason = [
        pattern.format(n=random_.choice(NAMES), a=a, b=b, c=c)
        for pattern in SUMS
        for a, b, c in random_.sample(numbers, 40)
    ]
    on_text = [random_.choice(ON_TEXT).format(text(random_)) for _ in range(700)]
    kinds = {"chat": chat, "code": code, "reason": reason, "text": on_text}
    found = [{"category": kind, "prompt": prompt} for kind, all_ in kinds.items() for prompt in all_]
    random_.shuffle(found)
    return found


if __name__ == "__main__":
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in prompts(0)]
    Path(__file__).with_name("prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
