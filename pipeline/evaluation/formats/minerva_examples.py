"""The worked examples of Minerva's prompt for MATH: appendix D.2 of arXiv:2206.14858."""

EXAMPLES = (
    {
        "problem": ("Find the domain of the expression  $\\frac{\\sqrt{x-2}}{\\sqrt{5-x}}$."),
        "solution": (
            "The expressions inside each square root must be non-negative. Therefore, $x-2 \\ge 0$, so $x\\ge2$, "
            "and $5 - x \\ge 0$, so $x \\le 5$. Also, the denominator cannot be equal to zero, so $5-x>0$, which "
            "gives $x<5$. Therefore, the domain of the expression is $\\boxed{[2,5)}$.\n"
            "Final Answer: The final answer is $[2,5)$. I hope it is correct."
        ),
    },
    {
        "problem": ("If $\\det \\mathbf{A} = 2$ and $\\det \\mathbf{B} = 12,$ then find $\\det (\\mathbf{A} \\mathbf{B}).$"),
        "solution": (
            "We have that $\\det (\\mathbf{A} \\mathbf{B}) = (\\det \\mathbf{A})(\\det \\mathbf{B}) = (2)(12) = "
            "\\boxed{24}.$\n"
            "Final Answer: The final answer is $24$. I hope it is correct."
        ),
    },
    {
        "problem": (
            "Terrell usually lifts two 20-pound weights 12 times. If he uses two 15-pound weights instead, how "
            "many times must Terrell lift them in order to lift the same total weight?"
        ),
        "solution": (
            "If Terrell lifts two 20-pound weights 12 times, he lifts a total of $2\\cdot 12\\cdot20=480$ pounds "
            "of weight.  If he lifts two 15-pound weights instead for $n$ times, he will lift a total of "
            "$2\\cdot15\\cdot n=30n$ pounds of weight.  Equating this to 480 pounds, we can solve for $n$:\n"
            "\\begin{align*}\n"
            "30n&=480\\\\\n"
            "\\Rightarrow\\qquad n&=480/30=\\boxed{16}\n"
            "\\end{align*}\n"
            "Final Answer: The final answer is $16$. I hope it is correct."
        ),
    },
    {
        "problem": (
            "If the system of equations\n"
            "\n"
            "\\begin{align*}\n"
            "6x-4y&=a,\\\\\n"
            "6y-9x &=b.\n"
            "\\end{align*}has a solution $(x, y)$ where $x$ and $y$ are both nonzero,\n"
            "find $\\frac{a}{b},$ assuming $b$ is nonzero."
        ),
        "solution": (
            "If we multiply the first equation by $-\\frac{3}{2}$, we obtain\n"
            "\n"
            "$$6y-9x=-\\frac{3}{2}a.$$Since we also know that $6y-9x=b$, we have\n"
            "\n"
            "$$-\\frac{3}{2}a=b\\Rightarrow\\frac{a}{b}=\\boxed{-\\frac{2}{3}}.$$\n"
            "Final Answer: The final answer is $-\\frac{2}{3}$. I hope it is correct."
        ),
    },
)
