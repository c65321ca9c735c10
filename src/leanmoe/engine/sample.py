"""What a model is given to read or to answer where nobody says: prose, talk, code, figures, several languages."""

TEXT = """\
The ferry left late. A mist had come in over the flats before dawn, and the pilot, who had crossed this water for thirty
years, would not be hurried by passengers who looked at their watches. "You can see it or you can't," he said, and went
below to warm his hands. By nine the far bank was a grey line, by half past a row of poplars, and at ten they moved.

Q: My bread does not rise. What am I doing wrong?
A: Most likely the water was too hot, or the yeast too old. Stir a spoonful of yeast into lukewarm water with a little
sugar and wait ten minutes; if it does not foam, throw it away. A cold kitchen only makes the dough slow: wait.

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

for name, times in measurements.items():
    print(f"{name:>12}: {median(times):.3f} s over {len(times)} runs")

A train leaves at 8:40 and travels 150 km at 90 km/h. The journey takes 150 / 90 = 5/3 hours, which is 1 h 40 min, so it
arrives at 10:20. If it waits twelve minutes on the way, it arrives at 10:32 and its mean speed falls to 80.4 km/h.

| river   | length, km | mouth         |
| ------- | ---------- | ------------- |
| Loire   | 1006       | Bay of Biscay |
| Vistula | 1047       | Baltic Sea    |
| Po      | 652        | Adriatic Sea  |

SELECT author, COUNT(*) AS books FROM library WHERE year >= 1990 GROUP BY author ORDER BY books DESC LIMIT 10;

Le vieux moulin ne tourne plus depuis l'hiver; on y garde du foin et des outils, et les enfants s'y cachent le soir.
Der Regen hatte die Wege aufgeweicht, und wer ins Dorf wollte, ging lieber über den Damm als durch die Wiesen.
La receta pide dos huevos, un vaso de leche y harina suficiente para que la masa no se pegue a las manos.
春の朝、川のそばを歩くと、水の音と鳥の声だけが聞こえる。
把面粉和水揉成面团,放在温暖的地方,等它发到两倍大。

The court held that a contract needs an offer, an acceptance and something given in return; a promise to make a gift,
however solemn, binds nobody. Two of the five judges disagreed, since the plaintiff had sold his house for it.

Cells copy their DNA before they divide. Two strands are pulled apart, and each serves as the pattern for a new one, so
that every daughter cell receives one old strand and one new. Errors happen about once in ten million letters, and most
of them are mended at once by enzymes that notice the bulge a wrong letter makes.
"""

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the prime numbers below n, and say how fast it is.",
    "I have eggs, rice and spinach. What can I cook in twenty minutes?",
    "Summarise what a court does when two witnesses contradict each other.",
)
